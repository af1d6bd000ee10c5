"""Files of all kinds that ``OfflineDataset.load`` reads, made wrong in their structure, and what it makes of them."""
