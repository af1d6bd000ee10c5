"""All entries by name."""

from tests.attack import flow_entries, kernel_entries, policy_entries

ENTRIES = {entry.name: entry for entry in (*kernel_entries.ENTRIES, *policy_entries.ENTRIES, *flow_entries.ENTRIES)}
