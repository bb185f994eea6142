def digits(responses: list[str], prompts: list[str]) -> list[float]:
    return [sum(c < "a" for c in r) / max(len(r), 1) for r in responses]
