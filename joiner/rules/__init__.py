"""A batch and its outcomes, the lease, the intent: what a joiner decides (paper 3.3). Pure."""
