"""What CI sees of a change's performance, on machines that nobody can trust to be quiet.

    counts   operations and bytes of fixed work: the same on every machine and in every run, so `make test` holds them
    ratios   two ways to do the same work, in turns in one run (`make perf`): what disturbs the machine disturbs both

No absolute time decides anything.
"""
