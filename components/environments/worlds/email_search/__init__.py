"""Questions that are answered from a mailbox of some thousands of mails, with the mails that show it."""

from components.environments.worlds.email_search.environment import EmailSearch

__all__ = ["EmailSearch"]
