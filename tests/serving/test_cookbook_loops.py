"""The loops of the package tinker_cookbook, as they are, against a server: conversations, preferences, rewards.

The package is not among the extras: docs/serve-training.md says why, and how to install it for this test.
"""

import asyncio
import json
from pathlib import Path

import pytest

from tests.serving import tiny_model
from tests.tiny import devices

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory, cache):
    """A server, with its model's tokenizer known to the cookbook by the model's name."""
    pytest.importorskip("tinker_cookbook")
    with pytest.MonkeyPatch.context() as patch, devices(1):
        for name, value in (("TINKER_API_KEY", "tml-any"), ("TINKER_TELEMETRY", "0"), ("HF_HUB_OFFLINE", "1")):
            patch.setenv(name, value)
        from tinker_cookbook import tokenizer_utils
        from transformers import AutoTokenizer

        folder = tiny_model.write(tmp_path_factory.mktemp("served") / "model")
        tokenizer_utils.register_tokenizer(tiny_model.NAME, lambda: AutoTokenizer.from_pretrained(f"{folder}"))
        with tiny_model.served(folder, tmp_path_factory.mktemp("saved"), batch_tokens=4096) as server:
            yield server


def metrics(config, name):
    lines = Path(config.log_path, "metrics.jsonl").read_text().splitlines()
    return [one[name] for one in map(json.loads, lines) if name in one]


def test_its_supervised_loop_learns_and_resumes(cookbook, tmp_path):
    from tinker_cookbook.renderers import TrainOnWhat
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.data import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"{n} plus one"}, {"role": "assistant", "content": f"{n + 1}"}]}) + "\n"
        for n in range(24)))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tiny_model.NAME, renderer_name="role_colon", max_length=128, batch_size=8,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)

    def config(steps):
        return train.Config(
            log_path=f"{tmp_path}/log", model_name=tiny_model.NAME, recipe_name="test", learning_rate=1e-2,
            dataset_builder=FromConversationFileBuilder(common_config=common, file_path=f"{path}"), num_epochs=6,
            max_steps=steps, lora_rank=4, base_url=cookbook.url, save_every=4, eval_every=0,
            infrequent_eval_every=0, lr_schedule="constant")

    asyncio.run(train.main(config(9)))
    record = Path(tmp_path, "log/checkpoints.jsonl")  # as if it had been killed before its end
    record.write_text("".join(line + "\n" for line in record.read_text().splitlines() if '"final"' not in line))
    asyncio.run(train.main(config(16)))
    assert metrics(config(16), "step") == [*range(16)]
    losses = metrics(config(16), "train_mean_nll")
    assert sum(losses[-3:]) < sum(losses[:3]) - 1


def test_its_reinforcement_loop_gets_more_reward(cookbook, tmp_path):
    import chz
    from tinker_cookbook import renderers, tokenizer_utils
    from tinker_cookbook.rl import train
    from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
    from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder

    class Vowels(ProblemEnv):
        def get_question(self):
            return "say a vowel"

        def check_answer(self, sample_str):
            return any(letter in sample_str for letter in "aeiou")

        def check_format(self, sample_str):
            return True

        def get_reference_answer(self):
            return "a"

    class Questions(RLDataset):
        def __init__(self, renderer):
            self.renderer = renderer

        def get_batch(self, index):
            return [ProblemGroupBuilder(lambda: Vowels(self.renderer, format_coef=0.0), 16) for _ in range(2)]

        def __len__(self):
            return 16

    @chz.chz
    class Builder(RLDatasetBuilder):
        async def __call__(self):
            words = tokenizer_utils.get_tokenizer(tiny_model.NAME)
            return Questions(renderers.get_renderer("role_colon", words)), None

    config = train.Config(log_path=f"{tmp_path}/log", model_name=tiny_model.NAME, recipe_name="test",
                          renderer_name="role_colon", dataset_builder=Builder(), learning_rate=2e-2, max_tokens=12,
                          lora_rank=8, base_url=cookbook.url, save_every=0, eval_every=0, loss_fn="ppo")
    asyncio.run(train.main(config))
    rewards = metrics(config, "env/all/reward/total")
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 1
    # What the sampler said of its tokens is what the trainer computes of them.
    assert max(map(abs, metrics(config, "optim/kl_sample_train_v1")[:3])) < 1e-5


def test_its_loop_of_preferences_learns_them(cookbook, tmp_path):
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"label": "A", "comparison": {
        "prompt_conversation": [{"role": "user", "content": f"say {n}"}],
        "completion_A": [{"role": "assistant", "content": f"yes {n}"}],
        "completion_B": [{"role": "assistant", "content": f"no {n}"}]}}) + "\n" for n in range(32)))
    common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=tiny_model.NAME, renderer_name="role_colon",
                                            max_length=128, batch_size=4)
    config = train_dpo.Config(
        log_path=f"{tmp_path}/log", model_name=tiny_model.NAME, recipe_name="test", renderer_name="role_colon",
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=common, comparison_builder=ComparisonBuilderFromJsonl(train_path=f"{path}")),
        learning_rate=1e-2, lr_schedule="constant", lora_rank=4, base_url=cookbook.url, num_replicas=1, save_every=0,
        eval_every=0, infrequent_eval_every=0)
    train_dpo.main(config)
    losses = metrics(config, "dpo_loss")
    assert abs(losses[0] - 0.6931) < 1e-3 and losses[-1] < 0.5  # the reference, and then better
