"""A call that fails for all of its samples, since some of them make it fail: the scores of the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from verl.rewards.scores import Score


async def isolate(call: Callable[[Sequence[int]], Awaitable[list[Score]]], count: int, failed: Score) -> list[Score]:
    """The scores of `count` samples whose call failed.

    The first sample that makes it fail is found by calls on halves, until it stands alone. Then the others are called
    together, so that scores which depend on the samples of a call still belong together; and so on, until that call
    gives scores. For each such sample these are at most 2 log2(count) calls.

    Args:
        call: from the numbers of some samples to their scores, or to a single one if the call failed. Where no more
            calls can be made it raises TimeoutError, and the samples that have no score by then share `failed`.
        failed: what the call on all samples said.
    """
    rest, scores, answer = list(range(count)), dict[int, Score](), [failed]
    try:
        while len(answer) < len(rest):
            part, reason, right = rest, failed, (list[int](), list[Score]())
            while len(part) > 1:
                half = part[: (len(part) + 1) // 2]
                answer = await call(half)
                if len(answer) < len(half) or (len(half) == 1 and answer[0].failed):
                    part, reason = half, answer[0]
                else:
                    part, right = part[len(half) :], (half, answer)
            miscounted = str(reason.reason).startswith("returned")
            if miscounted or reason is failed:  # no call on fewer samples has failed yet
                reason = (await call(part))[0]
            if miscounted and not reason.failed:  # the function counts wrong, whatever the samples
                answer = [failed]
                break
            scores[part[0]] = reason
            rest = [sample for sample in rest if sample != part[0]]
            answer = right[1] if right[0] == rest else await call(rest)
    except TimeoutError:
        answer = [failed]
    scores |= zip(rest, answer if len(answer) == len(rest) else answer * len(rest), strict=True)
    return [scores[sample] for sample in range(count)]
