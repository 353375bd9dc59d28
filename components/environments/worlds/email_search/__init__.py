"""Environment of questions over a mailbox of some thousands of mails; answers cite the mails that support them."""

from components.environments.worlds.email_search.environment import EmailSearch

__all__ = ["EmailSearch"]
