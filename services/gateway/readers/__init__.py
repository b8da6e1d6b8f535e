"""How an answer is read: from any position, by any number of connections."""
