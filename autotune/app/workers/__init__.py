"""Several workers of one machine: further processes that search the same study, each on its share of the devices."""
