"""The gated delta rule of linear attention."""
