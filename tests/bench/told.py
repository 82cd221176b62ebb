"""A study whose jobs are answered without training."""

import math

from bench.methods import METHODS
from bench.study import Study
from bench.study_child import Job, Source, Timing
from bench.study_search import Rates
from tests.bench.study_tasks import RATIO

SOURCE = Source("tests.bench.study_tasks", ratio=RATIO)
FIRST_RATE, SECOND_RATE = 1e-3, 1e-2
FIRST, SECOND = Rates(FIRST_RATE, 1.0), Rates(SECOND_RATE, 1.0)
SIZES = ("start_params", "mean_params", "compressed_params")


class Told:
    """Answers jobs without training; notes which there were."""

    def __init__(self, qualities=None, failing=(), stopped=(), better=lambda job: False):
        self.jobs, self.qualities = [], qualities or {}
        self.failing, self.stopped, self.better = failing, stopped, better

    def __call__(self, source, job):
        self.jobs.append(job)
        if isinstance(job, Timing):
            return [self.times(name) for name in job.methods]
        if job.method in self.failing:
            raise RuntimeError("exit 1: out of memory")
        if job.method in self.stopped:
            raise KeyboardInterrupt
        quality = self.qualities.get((job.method, job.seed, job.rate), 0.5)
        quality = 0.1 if self.better(job) else quality
        start, end = (768, 700) if METHODS[job.method].adapts else (700, 700)
        return [
            {
                "quality": quality,
                "curve": [[job.steps, 1.5, quality]],
                "compressed_params": end,
                "start_params": start,
                "mean_params": (start + end) // 2,
                "total_params": 2000,
                "optimizer_bytes": 4000,
                "peak_bytes": 2**20,
                "step_ms": 2.0,
                "seconds": 1.5,
                "cut_share": 0.0,
                "shapes": {"0": 3},
                "failure": "" if math.isfinite(quality) else "diverged by step 3",
            }
        ]

    @staticmethod
    def times(name):
        start, final = {"dense": (6.0, 6.0), "ours": (4.0, 2.0)}.get(name, (3.0, 3.0))
        return {"method": name, "start_ms": start, "final_ms": final, "dense_ms": 6.0, "rounds": 2}

    @property
    def runs(self):
        return [job for job in self.jobs if isinstance(job, Job)]


def make(tmp_path, told, **settings):
    settings = {
        "methods": ("dense", "tt"),
        "rates": (FIRST_RATE, SECOND_RATE),
        "rests": (1.0,),
        "seeds": (0, 1),
        **settings,
    }
    return Study(SOURCE, tmp_path, work=told, **settings)
