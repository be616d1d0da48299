"""Silent data corruption: device hashes, compared replicas, replayed steps and suspect devices."""
