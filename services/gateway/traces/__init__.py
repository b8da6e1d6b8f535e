"""The gateway's spans: of requests (`http.py`, `rpc.py`) and of what they generate (`answers.py`)."""
