"""How a request's tokens are chosen: sampling, and the grammar that an answer must match."""
