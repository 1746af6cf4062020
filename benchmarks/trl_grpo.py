"""Speed of GRPO steps with TRL; run by `benchmarks.rl_speed` with a Python that has TRL.

    python benchmarks/trl_grpo.py FOLDER

FOLDER has rl_speed.json (shape and numbers), tokenizer.json and prompts.jsonl. Prints the seconds
of each step, those of them in generate, and the tokens of completions, as JSON. Generation is that
of transformers, with its own cache.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import datasets
import torch
import transformers
import trl


class StepClock(transformers.TrainerCallback):
    """Seconds of each step."""

    def __init__(self):
        self.steps = []
        self.generating = []
        self.tokens = []
        self._began = 0.0

    def on_train_begin(self, args, state, control, **others):
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **others):
        now = time.perf_counter()
        self.steps.append(now - self._began)
        self._began = now

    def timed(self, generate):
        """Generation that is timed."""

        def generating(*args, **options):
            began = time.perf_counter()
            found = generate(*args, **options)
            self.generating.append(time.perf_counter() - began)
            return found

        return generating


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "rl_speed.json").read_text())
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=settings["end"],
        pad_token=settings["end"],
        padding_side="left",
    )
    config = transformers.Qwen2Config(
        **settings["shape"],
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.Qwen2ForCausalLM(config).float()
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = datasets.Dataset.from_list([json.loads(line) for line in lines])
    clock = StepClock()

    def reward(prompts, completions, completion_ids, **columns):
        clock.tokens.append(sum(map(len, completion_ids)))
        return [float(bool(re.search(settings["regex"], text))) for text in completions]

    rows = settings["prompts"] * settings["samples"]
    options = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows,
        num_generations=settings["samples"],
        max_completion_length=settings["tokens"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        top_k=0,
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=options,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    model.generate = clock.timed(model.generate)
    trainer.train()
    found = {
        "steps": clock.steps,
        "generating": clock.generating,
        "tokens": clock.tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, trl)},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
