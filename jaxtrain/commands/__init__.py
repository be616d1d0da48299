"""The commands of `jaxtrain`: one module each, of the command's name, with its flags, its help and its main.

Commands are on top: they read flags and call functions of the rooms below, which take plain arguments.
"""

# What a command does is the first line of its module's docstring; here too, so that --help imports none of them.
GROUPS: dict[str, dict[str, str]] = {
    "train": {
        "train": "Train a config, or resume its run.",
        "configs": "List the configs that come with jaxtrain, or print one.",
        "supervise": "Start processes as one run, and restart them when one dies or hangs.",
        "launch": "Submit a run to this machine, Slurm, Kubernetes or Ray, or write a job file.",
        "jobs": "List, pause, resume and cancel jobs on any engine.",
        "sweep": "Search values of config keys with many runs, and stop bad ones early.",
        "elastic": "List the numbers of processes on which a run could continue.",
        "serve_training": "Serve the Tinker API: clients train adapters of a model here, and sample.",
        "serve_sampler": "Serve a model as the sampler of a run on this machine.",
        "diloco": "Coordinate islands: serve their updates, make certificates, show the state.",
    },
    "data": {
        "prepare": "Tokenize text into a corpus to train on.",
        "prepare_sequences": "Prepare audio clips, tables of events or images as sequences.",
        "train_tokenizer": "Train a byte-level BPE tokenizer on text of your own.",
        "inspect": "Show any training batch of a run: documents, their text, and the tokens trained on.",
        "data": "Find the steps of a run that saw a document, a text or an evaluation set.",
        "publish": "Copy a corpus to object storage for training.",
        "croissant": "Write the datasheet of a corpus in the Croissant 1.0 format.",
    },
    "trained models": {
        "generate": "Generate text from prompts with a trained or published model.",
        "transcribe": "Transcribe audio files, or live speech.",
        "evaluate": "Evaluate a trained or published model on tasks of lm-evaluation-harness.",
        "export": "Export a run's model as a folder in Hugging Face's format.",
        "merge": "Merge models of one architecture into one folder in Hugging Face's format.",
        "quantize": "Write a model in few bits for other programs: a GGUF file, or a folder of 4-bit layers.",
        "adapters": "List, version, merge or export adapters (LoRA) in PEFT's format.",
    },
    "runs": {
        "runs": "List, compare, tag and reproduce runs, and delete what they no longer need.",
        "bisect": "Find the step and the operation at which two runs part.",
        "top": "Monitor runs in the terminal: loss, throughput, time left, events and processes.",
        "report": "Write a report of one or several runs as an HTML page, or serve it while they train.",
        "checkpoint": "List, verify and compare a run's checkpoints, or restore an earlier one.",
        "goodput": "Show where a run's time went across restarts, and its goodput.",
        "dashboards": "Write dashboards for Grafana and alert rules for Prometheus.",
    },
    "speed and planning": {
        "plan": "Rank meshes for given hardware by speed, with their memory and cost.",
        "calibrate": "Measure the speed of this machine's devices, for the planner.",
        "bench": "Measure a config's training speed on this machine, and where the time goes.",
        "compile": "Compile a run's programs ahead of time, for other machines too.",
        "profile": "Profile a running training job: where the time of its steps goes.",
        "scaling": "Fit a scaling law to finished runs: predict the loss, and the best size for a budget.",
        "schedules": "Draw a pipeline schedule, and compute its bubble and memory.",
        "simulate": "Predict goodput under failures, and choose save intervals, tiers and spare machines.",
        "prove": "Prove that a config gives the numbers of one device on any mesh.",
        "coordinates": "Check whether activations grow with width: the coordinate check of muP.",
    },
    "machines": {
        "doctor": "Check this machine for problems that make training fail or slow it down.",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
