"""Workers of one machine: processes that search the same study, each on its share of the devices."""
