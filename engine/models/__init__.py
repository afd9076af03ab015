"""The network and what describes it: configuration, rotary scaling, checkpoint."""
