"""`ryzanstein fine-tune`: jobs of fine-tuning, by the gateway's HTTP API.

command    create, status, list, cancel, pause, resume, follow, checkpoints, events
client     /v1/fine_tuning/jobs
curve      losses as a picture of characters
export     the adapter as files: peft's, or merged with its base
progress   what a job's events say of how far it is, and how that is shown
"""
