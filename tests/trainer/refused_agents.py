"""An agent and an environment, by path."""

from __future__ import annotations

import verl


class Shop:
    def reset(self) -> None: ...

    def price(self, item: str) -> int:
        """The price of an item.

        Args:
            item: its name
        """
        return 3

    def get_reward(self) -> float:
        return 1.0


gateway = verl.Gateway("python agent.py", chat_template="hermes")
shop = verl.EnvironmentEpisode(Shop, chat_template="hermes")
