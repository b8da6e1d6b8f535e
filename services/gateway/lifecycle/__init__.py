"""The life cycle of a generation: submitted, recorded, followed, recovered, taken over, cancelled."""
