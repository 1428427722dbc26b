"""Order swaps injected below the sequencer's checks, over real processes."""
