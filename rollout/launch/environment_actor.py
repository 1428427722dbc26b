"""A host of environments as an object that some other process on another machine may hold."""

from __future__ import annotations

import asyncio
import contextlib
import json

from interlace.envs.host import HostDied, SubprocessHost


class EnvironmentActor:
    """Carries frames to a SubprocessHost on its own node.

    Environments do not run in the actor's process: there they could write into its files, exceed
    no limit that is theirs alone, and leave processes behind that nobody knows of.
    """

    async def open(self, variables: str) -> None:
        """Start the host; its environments see `variables`, a JSON object of texts. Raises what
        `SubprocessHost.start` raises."""
        self._host = await SubprocessHost.start(variables=json.loads(variables))

    async def call(self, frame: bytes) -> bytes | tuple[str, bool]:
        """The reply; or message and `idle` of a HostDied, in types that need no import."""
        try:
            return await self._host.call(frame)
        except HostDied as error:
            return str(error), error.idle

    async def live(self) -> None:
        """Never returns: who waits for it learns of the end of this process."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """End the host; returns when everything it had started is gone."""
        self._host.kill()
        with contextlib.suppress(HostDied):
            await self._host.call(b'{"op": "hello"}')
