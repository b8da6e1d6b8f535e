"""Draft models of a ring: what proposes tokens beside the model that is served."""
