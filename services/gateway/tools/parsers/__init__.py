"""How families of models write tool calls: one incremental reader each."""
