"""The rules of the last version that recorded none in its snapshots, by root: what such a snapshot covered.

They never change, because restores of those snapshots use them. What was optional then counts as covered.
"""

from __future__ import annotations

from types import MappingProxyType

from sidecar.layouts import CoveredRules

# fmt: off
_CLAUDE_CODE = CoveredRules(
    keep=(
        "projects/*/memory/**", "projects/*/*.jsonl", "projects/*/????????-????-????-????-????????????/**",
        "todos/**", "tasks/**", "plans/**", "CLAUDE.md", "history.jsonl",
    ),
    left=(
        "/debug/", "/shell-snapshots/", "/session-env/", "/paste-cache/", "/image-cache/", "/telemetry/",
        "/ide/", "/daemon.*", "/stats-cache.json", "/plugins/", "/statsig/", "/backups/", "*.lock",
        "*.tmp.*", ".credentials.json", ".claude.json", ".claude.json.*", ".env",
    ),
)
_CLAUDE_MEM = CoveredRules(
    keep=(
        "corpora/**", "modes/**", "transcript-watch.json", ".cleanup-v*-applied", ".cwd-remap-applied-v*",
        "settings.json", "claude-mem.db", "chroma/**", "chroma-sync-state.json",
    ),
    left=(
        "/worker.pid", "/supervisor.json", "/.server-beta.*", "/spawn.lock", "*.sock",
        "/.worker-start-attempted", "/.worker-clean-shutdown", "/state/", "/worker-version-recycle.json",
        "/observer-health.json", "/quota-cooldown.json", "/oauth-stale.marker", "/CAPTURE_BROKEN",
        "/last-install-error.json", "/logs/", "/observer-audit.log", "/backups/", "/*.bak-*", "/archives/",
        "/trash/", "/observer-sessions/", "/combined_certs.pem", "/telemetry.json",
        "/transcript-watch-state.json", ".env", "/oauth-*",
    ),
)
_CODEX = CoveredRules(
    keep=(
        "sessions/**", "archived_sessions/**", "session_index.jsonl", "memories/**", "state_*.sqlite",
        "thread_history_*.sqlite", "memories_*.sqlite", "goals_*.sqlite",
    ),
    left=(
        "/queue_*.sqlite", "/logs_*.sqlite", "/log/", "/tmp/", "/.tmp/", "/thread-writer-locks/",
        "/shell_snapshots/", "/installation_id", "/.sandbox*", "*.lock", "*.tmp.*", "auth.json",
        "/config.toml", "/history.jsonl", ".credentials.json", ".env",
    ),
)
_CODYMASTER = CoveredRules(
    keep=(
        "CONTINUITY.md", "config.yaml", "memory/*.json", "context-bus.json", "skeleton.md",
        "architecture.mmd", "cm-tasks.json", "kanban.json", "profile.json", "context.db",
    ),
    left=(
        "/*-index.md", "/token-budget.json", "/dashboard.pid", "*.backup", "*.lock", "*.tmp.*", ".env",
        ".env.*",
    ),
)
_OPENCODE = CoveredRules(
    keep=(
        "storage/**", "project/**", "opencode*.db",
    ),
    left=(
        "/log/", "/repos/", "/bin/", "/snapshot/", "/tool-output/", "*.lock", "*.tmp.*", "auth.json",
        "account.json", "mcp-auth.json", ".env",
    ),
)
_PAI = CoveredRules(
    keep=(
        "{WORK,LEARNING,RESEARCH,RELATIONSHIP,WISDOM,PAISYSTEMUPDATES}/**", "STATE/current-work*.json",
        "STATE/progress/**", "RAW/**", "SECURITY/**",
    ),
    left=(
        "STATE/**/*cache*", "STATE/integrity/", "STATE/*-streak.json", "*.lock/", "*.tmp.*", ".env",
        ".env.*",
    ),
)
_THREE_TIER = CoveredRules(
    keep=(
        "SESSION-STATE.md", "MEMORY.md", "memory/**", "tasks/todo.md", "tasks/lessons.md",
    ),
    left=(
        "*.lock", "*.lck", ".#*", "*~", "*.swp", "*.swo", "*.swx", "4913", "#*#", "*.tmp.*", ".env",
        ".env.*",
    ),
)
# fmt: on

PROJECTS = frozenset({"project", "cm"})
"""Roots of projects, which that version did not search for."""
EARLIER = MappingProxyType(
    {
        "claude-code": _CLAUDE_CODE,
        "claude-mem": _CLAUDE_MEM,
        "codex": _CODEX,
        "cm": _CODYMASTER,
        "codymaster": _CODYMASTER,
        "opencode": _OPENCODE,
        "pai": _PAI,
        "project": _THREE_TIER,
    }
)
