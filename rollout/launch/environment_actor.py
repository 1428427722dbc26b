"""A host of environments as an object that some other process on another machine may hold."""

from __future__ import annotations

import asyncio
import json

from interlace.envs.host import HostDied, SubprocessHost

from .wire import knock


class EnvironmentActor:
    """Carries frames to a SubprocessHost on its own node.

    Environments do not run in the actor's process: there they could write into its files, exceed
    no limit that is theirs alone, and leave processes behind that nobody knows of.
    """

    async def open(self, variables: str, path: str | None = None) -> None:
        """Start the host; its environments see `variables`, a JSON object of texts. Raises what
        `SubprocessHost.start` raises. Who has a `Door` at `path` makes the calls then."""
        self._host = await SubprocessHost.start(variables=json.loads(variables))
        if path is not None:
            with knock(path) as connection:
                self._host.lend(connection)

    async def call(self, frame: bytes) -> bytes | tuple[str, bool]:
        """The reply; or message and `idle` of a HostDied, in types that need no import."""
        try:
            return await self._host.call(frame)
        except HostDied as error:
            return str(error), error.idle

    async def live(self) -> None:
        """Never returns: who waits for it learns of the end of this process."""
        await asyncio.Event().wait()

    async def close(self) -> str:
        """End the host; how it ended, when everything it had started is gone."""
        self._host.kill()
        try:
            await self._host.call(b'{"op": "hello"}')
        except HostDied as error:
            return str(error)
        raise AssertionError("a host that was killed has answered")
