"""The command `rlhf-rollout`: generate, score, serve a reward, and chat, with any engine and any reward."""

import argparse
import sys
from collections.abc import Sequence

from rlhf_data.errors import RlhfError
from rlhf_data.flags import Parser
from rlhf_rollout.host import wait_passively

COMMANDS = {
    "generate": "sample responses to a file of prompts, or make training data of them",
    "score": "give the answers in a file rewards",
    "serve_rm": "serve a reward, such as a reward model, over HTTP",
    "chat": "talk to a model in the terminal",
}
POST_PROCESSORS = {
    "rollouts": "one record a response, tokens and log-probs included",
    "plain": "one input/output row a response",
    "best_of_n": "the response with the highest reward, for each prompt",
    "rs": "rejection sampling: the different responses that the reward accepts",
    "iter_dpo": "prompt/chosen/rejected: the responses with the highest and the lowest reward that are not cut",
    "csft": "conditional SFT: every response, with its reward written into its input",
}


def main(arguments: Sequence[str] | None = None, *, prog: str = "rlhf-rollout") -> int:
    """Run the command and return its exit status: 0, 1 when some prompts failed, 2 when it cannot run."""
    wait_passively()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parse(arguments, prog)
        if options.command == "generate":
            from rlhf_rollout.commands.generate import generate as command
        elif options.command == "score":
            from rlhf_rollout.commands.score import score as command
        elif options.command == "serve_rm":
            from rlhf_rollout.commands.serve_rm import serve as command
        else:
            from rlhf_rollout.commands.chat import chat as command
        return command(options)
    except RlhfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(prog=prog, description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
        )
        _ADD[name](command)
        if arguments[:1] == [name]:
            command.check_flags(arguments)
    return parser.parse_args(arguments)


def _add_generate(command: argparse.ArgumentParser) -> None:
    data = command.add_argument_group("prompts")
    data.add_argument("--prompts", "--prompt_data", "--dataset", required=True, metavar="LIST", help="data files")
    probs = "with commas: a probability for each source of --prompts; by default one after the other"
    data.add_argument("--prompt_data_probs", metavar="LIST", help=probs)
    data.add_argument("--label_key", help="key of the reference answer, for the reward")
    data.add_argument("--prompt_max_len", type=int, default=1024, help="tokens; longer prompts are left out")
    _add_rows(data)
    sampling = command.add_argument_group("sampling")
    sampling.add_argument("--num_samples", "--best_of_n", type=int, default=1, help="responses a prompt")
    _add_sampling(sampling, temperature=1.0)
    _add_engine(command.add_argument_group("engine"))
    _add_reward(command.add_argument_group("reward"))
    output = command.add_argument_group("output")
    _add_out(output)
    output.add_argument("--resume", action="store_true", help="go on where a run that was stopped left off")
    lines = "; ".join(f"{name}: {text}" for name, text in POST_PROCESSORS.items())
    output.add_argument("--post_processor", default="rollouts", metavar="KIND", help=lines)
    output.add_argument("--min_reward", type=float, help="rs accepts from there on; else what has the verdict ok")
    template = "csft: how the reward goes into the input"
    output.add_argument("--reward_template", default="{input} <rm_score>: {reward} ", metavar="TEXT", help=template)


def _add_score(command: argparse.ArgumentParser) -> None:
    data = command.add_argument_group("answers")
    data.add_argument("--dataset", required=True, metavar="LIST", help="data files")
    data.add_argument("--output_key", default="output", help="key of the answer")
    data.add_argument("--label_key", help="key of the reference answer, for functions and servers")
    data.add_argument("--chosen_key", help="score pairs of answers: the key of the preferred one")
    data.add_argument("--rejected_key", default="rejected", help="pairs: key of the other one")
    data.add_argument("--prompt_key", help="pairs: key of the prompt, when the answers do not hold it")
    data.add_argument("--max_len", type=int, default=2048, help="tokens of prompt and answer; longer rows are left out")
    data.add_argument("--tokenizer", metavar="DIR", help="by default that of the reward model")
    _add_rows(data)
    _add_reward(command.add_argument_group("reward"))
    _add_out(command.add_argument_group("output"))


def _add_serve_rm(command: argparse.ArgumentParser) -> None:
    server = command.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    server.add_argument("--port", type=int, default=5000, help="port to listen on")
    server.add_argument("--tokenizer", metavar="DIR", help="by default that of the reward model")
    _add_reward(command.add_argument_group("reward"))


def _add_chat(command: argparse.ArgumentParser) -> None:
    talk = command.add_argument_group("conversation")
    talk.add_argument("--system", metavar="TEXT", help="the system message")
    talk.add_argument("--input_template", metavar="TEXT", help="text with one {}, for a model without chat template")
    talk.add_argument("--prompt_max_len", type=int, default=1792, help="tokens that a conversation may have")
    _add_sampling(command.add_argument_group("sampling"), temperature=0.7)
    _add_engine(command.add_argument_group("engine"))


def _add_rows(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input_key", default="input", help="key of the question in a row")
    group.add_argument("--apply_chat_template", action="store_true", help="render with the tokenizer's chat template")
    group.add_argument("--input_template", metavar="TEXT", help="text with one {} for the question")
    group.add_argument("--max_samples", type=int, help="read only so many rows of each file")
    group.add_argument("--skip_bad_rows", action="store_true", help="leave out rows that cannot be used, however many")


def _add_sampling(group: argparse._ArgumentGroup, temperature: float) -> None:
    group.add_argument("--max_tokens", "--max_new_tokens", type=int, default=256, help="new tokens of a response")
    group.add_argument("--temperature", type=float, default=temperature, help="0 is greedy")
    group.add_argument("--top_p", type=float, default=1.0, help="nucleus mass")
    group.add_argument("--top_k", type=int, default=-1, help="-1 for all tokens")
    group.add_argument("--seed", type=int, help="makes the responses repeatable")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engine", default="vllm", help="vllm, transformers, http or fake")
    group.add_argument("--model", "--pretrain", metavar="DIR", help="folder or hub name; for http the server's name")
    group.add_argument("--tokenizer", metavar="DIR", help="folder or hub name, when it is not the model's")
    group.add_argument("--base_url", metavar="URL", help="the vLLM server, for http")
    group.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    group.add_argument("--max_num_seqs", type=int, default=64, help="responses decoded at once")
    group.add_argument("--gpu_memory_utilization", type=float, default=0.9, help="share of the GPU's memory")
    group.add_argument("--tensor_parallel_size", "--tp_size", type=int, default=1, help="GPUs of the engine")


def _add_reward(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--reward",
        "--remote_rm_url",
        metavar="LIST",
        help="with commas: FILE.py with reward_func, module:function, or URLs of a reward server, which take turns",
    )
    group.add_argument("--reward_pretrain", metavar="LIST", help="with commas: folders or hub names of reward models")
    group.add_argument("--reward_weights", metavar="LIST", help="with commas: a number a reward, all URLs being one")
    group.add_argument("--reward_timeout_s", type=float, default=30.0, help="time limit of one call")
    group.add_argument("--reward_workers", type=int, default=2, help="calls at once, of each function")
    group.add_argument("--reward_batch_size", type=int, default=64, help="answers of a server's or a model's call")
    group.add_argument("--reward_dtype", default="float32", help="of reward models: float32 or bfloat16")
    group.add_argument("--normalize_reward", action="store_true", help="by the moments stored with a reward model")


def _add_out(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", "--output_path", required=True, metavar="FILE.jsonl", help="where the rows go")
    group.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


_ADD = {"generate": _add_generate, "score": _add_score, "serve_rm": _add_serve_rm, "chat": _add_chat}


if __name__ == "__main__":
    sys.exit(main())
