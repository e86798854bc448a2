"""Run by vLLM's own environment: greedy tokens and logprobs of a model folder, as JSON.

`python vllm_greedy.py FOLDER < request.json`, where the request is
`{"prompts": [[ids]], "messages": [...], "num_tokens": N}`.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main():
    request = json.load(sys.stdin)
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        # A seeded request that is prefilled in chunks kills the CPU engine of 0.32.
        max_num_batched_tokens=4096,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["num_tokens"], logprobs=0, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    replies = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        (reply,) = output.outputs
        ids = list(reply.token_ids)
        logprobs = [row[index].logprob for row, index in zip(reply.logprobs, ids, strict=True)]
        replies.append({"token_ids": ids, "logprobs": logprobs})
    told = llm.chat(request["messages"], sampling, use_tqdm=False)
    result = {"replies": replies, "chat_ids": list(told[0].prompt_token_ids)}
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
