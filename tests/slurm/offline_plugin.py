"""SkyPilot server plugin for a machine without internet.

The managed-jobs controller asks https://8.8.8.8 and https://1.1.1.1 before
every status poll and waits (for ever) while neither answers.  This points
that probe at the local API server instead, through SkyPilot's own plugin
hook (~/.sky/plugins.yaml); nothing of SkyPilot's is edited on disk.
"""

import os

from sky.server import plugins


class OfflinePlugin(plugins.BasePlugin):
    def __init__(self, url=None):
        port = os.environ.get("SKYPILOT_API_SERVER_LOCAL_PORT", "46580")
        self.url = url or f"http://127.0.0.1:{port}/api/health"

    @property
    def name(self):
        return "offline-network-check"

    def install(self, extension_context):
        del extension_context
        from sky.backends import backend_utils

        backend_utils._TEST_IP_LIST[:] = [self.url]
