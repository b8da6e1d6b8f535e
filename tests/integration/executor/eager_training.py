"""An executor whose trainers give way to nobody: beside other tests they would hardly be scheduled. Started as
`python -m tests.integration.executor.eager_training`; by itself as a trainer, with the descriptor of its events."""

import os
import runpy
import sys

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdecimal():
        from services.executor.training import __main__ as trainer

        trainer.give_way = lambda: None
        os._exit(trainer.main(int(sys.argv[1])))
    from services.executor.supervisor.trainings import trainer_process

    trainer_process.TRAINER = "tests.integration.executor.eager_training"
    runpy.run_module("services.executor", run_name="__main__", alter_sys=True)
