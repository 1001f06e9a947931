"""Low-rank adapters of linear layers, experts and gated units."""
