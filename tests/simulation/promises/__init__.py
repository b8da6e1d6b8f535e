"""What must hold, during a run and after it, whatever happened: each promise says in one sentence what is broken."""
