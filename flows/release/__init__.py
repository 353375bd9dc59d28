"""Release of a trained policy: approval, registration, champion, deployment, retention."""
