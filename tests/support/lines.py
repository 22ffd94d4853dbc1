"""Writes example lines of a run's metrics.jsonl."""

from pretrainax.training.metrics_writer import MetricsWriter


def example_metrics(step: int) -> dict:
    return {
        "loss": 10 / step,
        "perplexity": 2.0,
        "accuracy": 0.25,
        "learning_rate": 1e-3,
        "gradient_norm": 1.5,
        "tokens_per_second": 5123.4,
        "step_seconds": 0.5,
        "mfu": None,
    }


def log_steps(workdir, steps, resume_step=0, total=40):
    run = MetricsWriter(str(workdir), total_steps=total, resume_step=resume_step)
    for step in steps:
        run.log(step, "train", example_metrics(step))
        if step % 2 == 0:
            run.log(step, "valid", example_metrics(step))
    run.close()
