"""How a response is shown: its items, and the events that write them."""
