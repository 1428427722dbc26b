"""What `native/` is to Python: addresses and sizes in elements, explained in native/kernels.h.

An element is one of the matrices: `item_size` is 2 for bfloat16 and 4 for float32.
"""

from collections.abc import Sequence

def instructions() -> str:
    """The instructions that the kernels use; empty where this processor runs none."""

def choices() -> tuple[str, ...]:
    """All instructions that there are kernels for and this processor runs, the best first."""

def use(instructions: str, /) -> None:
    """From now on the kernels for these, which are one of `choices`. What was packed before is to
    be packed again, and nothing else may be computing."""

def panel() -> int:
    """Outputs that lie side by side in a packed weight."""

def pack(
    item_size: int,
    to: int,
    weight: int,
    outputs: int,
    inputs: int,
    output_stride: int,
    input_stride: int,
    /,
) -> None: ...
def multiply(
    item_size: int,
    out: int,
    out_stride: int,
    x: int,
    x_stride: int,
    rows: int,
    packed: int,
    outputs: int,
    inputs: int,
    /,
) -> None: ...
def experts(
    item_size: int,
    out: int,
    x: int,
    x_stride: int,
    reads: int,
    writes: int,
    hidden: int,
    width: int,
    counts: Sequence[int],
    matrices: Sequence[int],
    /,
) -> None: ...
def experts_apart(
    item_size: int,
    out: int,
    x: int,
    x_stride: int,
    reads: int,
    writes: int,
    hidden: int,
    width: int,
    counts: Sequence[int],
    matrices: Sequence[int],
    owners: object,
    /,
) -> object:
    """The same, for `compute_on`. The `owners` of all memory live as long."""

def compute_on(apart: object, watch: object, most: int, /) -> bool:
    """Compute until the watch (watch.h) says that what it is for is there; if it is None, until it
    could be asked `most` times, and to the end if that is 0. Whether this is the end."""

def norm(
    item_size: int,
    out: int,
    sum: int,
    x: int,
    x_stride: int,
    y: int,
    weight: int,
    rows: int,
    width: int,
    eps: float,
    factor: float,
    /,
) -> None: ...
def choose(
    item_size: int,
    ids: int,
    weights: int,
    logits: int,
    logits_stride: int,
    rows: int,
    experts: int,
    top_k: int,
    normalise: int,
    scale: float,
    /,
) -> None: ...
def mix(
    item_size: int,
    out: int,
    residual: int,
    outputs: int,
    places: int,
    weights: int,
    rows: int,
    top_k: int,
    width: int,
    factor: float,
    /,
) -> None: ...
def turn_heads(
    item_size: int,
    queries: int,
    qkv: int,
    qkv_stride: int,
    norm: int,
    cos: int,
    sin: int,
    slots: int,
    pages: int,
    rows: int,
    heads: int,
    kv_heads: int,
    width: int,
    eps: float,
    /,
) -> None: ...
def attend(
    item_size: int,
    out: int,
    queries: int,
    pages: int,
    tables: int,
    tables_stride: int,
    starts: int,
    positions: int,
    sequences: int,
    heads: int,
    kv_heads: int,
    width: int,
    scale: float,
    /,
) -> None: ...
def attention_block(
    item_size: int,
    sum: int,
    out: int,
    ids: int,
    weights: int,
    x: int,
    rows: int,
    cos: int,
    sin: int,
    slots: int,
    pages: int,
    tables: int,
    tables_stride: int,
    starts: int,
    positions: int,
    sequences: int,
    hidden: int,
    input_norm: int,
    qkv: int,
    head_norm: int,
    heads: int,
    kv_heads: int,
    width: int,
    attention_scale: float,
    o: int,
    post_norm: int,
    router: int,
    experts: int,
    top_k: int,
    normalise: int,
    router_scale: float,
    factor: float,
    eps: float,
    /,
) -> None: ...
def attention_block_apart(
    item_size: int,
    sum: int,
    out: int,
    ids: int,
    weights: int,
    x: int,
    rows: int,
    cos: int,
    sin: int,
    slots: int,
    pages: int,
    tables: int,
    tables_stride: int,
    starts: int,
    positions: int,
    sequences: int,
    hidden: int,
    input_norm: int,
    qkv: int,
    head_norm: int,
    heads: int,
    kv_heads: int,
    width: int,
    attention_scale: float,
    o: int,
    post_norm: int,
    router: int,
    experts: int,
    top_k: int,
    normalise: int,
    router_scale: float,
    factor: float,
    eps: float,
    owners: object,
    /,
) -> object:
    """The same, for `compute_on`; see `experts_apart`."""

def finish(
    item_size: int,
    logits: int,
    x: int,
    norm: int,
    rows: int,
    width: int,
    eps: float,
    packed: int,
    outputs: int,
    experts: int,
    id_size: int,
    ids: int,
    layers: int,
    num_routed: int,
    top_k: int,
    /,
) -> None: ...
def straight(
    item_size: int,
    x: int,
    ids: int,
    rows: int,
    cos: int,
    sin: int,
    slots: int,
    pages: int,
    tables: int,
    tables_stride: int,
    starts: int,
    positions: int,
    sequences: int,
    pages_size: int,
    width: int,
    asked: int,
    num_asked: int,
    owned: tuple[int, ...],
    layers: bytes,
    num_layers: int,
    /,
) -> object:
    """A pass through all layers that is about to begin (native/straight.h). `pages_size`: elements
    of a layer's pages. `asked`: ascending rows, the only ones that the last layer's experts are
    for, which come first in `x` in the end; `num_asked` is negative for all. `owned`: experts of
    each member. `layers`: of each as many numbers of eight bytes, what `attention_block` takes from
    `hidden` on and then the addresses of its experts' matrices."""

def go_on(run: object, crossing: int, /) -> int:
    """Compute as far as messages have come: 0 if it is through, 1 if it waits for one, 2 if there
    is something wrong with one."""

def go_on_beside(run: object, crossing: int, other: object, others: int, /) -> int:
    """The same of two passes side by side, whose messages go by turns, the first one's first."""

def spent(run: object, /) -> tuple[float, float, float, float]:
    """Seconds so far in blocks, dealing, experts and sums."""

def deal(
    to: int,
    places: int,
    counts: int,
    rows: int,
    row_bytes: int,
    stride_bytes: int,
    ids: int,
    num_ids: int,
    top_k: int,
    experts: int,
    /,
) -> None: ...
def by_expert(order: int, counts: int, members: int, experts: int, /) -> None: ...
def lay_out(
    to: int,
    padded: int,
    width: int,
    num_blocks: int,
    input_ids: tuple[int, ...],
    positions: tuple[int, ...],
    starts: tuple[int, ...],
    tables: tuple[tuple[int, ...], ...],
    sample_rows: tuple[int, ...],
    /,
) -> bool:
    """Puts the parts of a batch behind one another, int64 (native/layout.h): ids and positions, of
    `padded` rows each, slots, tables of `width`, starts, lengths and sample rows. False where they
    do not fit together, or a block is none of `num_blocks`."""

def take_rows(
    to: int, table: int, table_rows: int, row_bytes: int, ids: int, num_rows: int, /
) -> bool:
    """False where an id is not in the table."""

def draw(
    logits: int,
    size: int,
    temperatures: Sequence[float],
    noises: Sequence[tuple[int, int, int]],
    /,
) -> list[tuple[int, float, float] | None]: ...
