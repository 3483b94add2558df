"""A dataflow of one's own: answer, keep each problem's best answer if it earns a reward, imitate it (rejection sampling).

python examples/dataflow/rejection_sampling.py model.path=MODEL data.train_files=[train.jsonl] training.total_steps=20
"""

import sys

from verl import load_config
from verl.algorithms.losses import SFTLoss
from verl.controller import Call, DispatchPlan, Worker, WorkerSpec, register
from verl.data.batch import TokenBatch
from verl.rewards.score import build_reward
from verl.trainer.inputs import load_rl_inputs
from verl.trainer.roles import closing_runtime, resource_pool, start_runtime
from verl.trainer.rollouts import generate, training_sampling
from verl.workers.model import ActorWorker
from verl.workers.rollout import RolloutWorker


def deal(layout, args, kwargs):  # a dispatch: what each rank is called with, and how results are joined
    (items,), n = args, layout.world_size
    calls = {rank: Call((items[rank::n],), kwargs) for rank in range(n)}
    return DispatchPlan(calls, lambda results: [item for rank in sorted(results) for item in results[rank]])


class Judge(Worker):
    @register(dispatch=deal)
    def best(self, groups):
        with build_reward(self.config.reward) as reward:
            scored = [reward.score(group)[0] for group in groups]
        return [best for group in scored if (best := max(group, key=lambda t: t.reward)).reward > 0]

    def __init__(self, context, *, config):
        super().__init__(context)
        self.config = config


def train(config) -> list[float]:
    inputs, runtime, loss, losses = load_rl_inputs(config), start_runtime(config), SFTLoss(), []
    steps, rows, n = config.training.total_steps, config.data.train_batch_size, config.rollout.n
    roles = {"actor": WorkerSpec(ActorWorker, {"config": config, "total_updates": steps})}
    roles |= {"rollout": WorkerSpec(RolloutWorker, {"config": config}), "judge": WorkerSpec(Judge, {"config": config})}
    with closing_runtime(runtime):
        groups = runtime.spawn(resource_pool(config), roles)
        for step in range(steps):
            prompts = inputs.train.batch([i % len(inputs.train) for i in range(step * rows, (step + 1) * rows)])
            answers = generate(groups["rollout"], prompts, training_sampling(config), seed=0, step=step)
            kept = groups["judge"].best([answers[i : i + n] for i in range(0, len(answers), n)])
            if kept:
                batch = TokenBatch.from_trajectories(kept)
                losses.append(groups["actor"].update(batch, loss, loss.count(batch))["sft/loss"].value)
                groups["rollout"].sync_weights(step + 1)
            print(f"step {step + 1}: kept {len(kept)} of {rows} problems, loss {losses[-1] if losses else float('nan'):.3f}")
    return losses


if __name__ == "__main__":
    train(load_config(None, sys.argv[1:]))
