"""The catalog: trajectories of stores, archives and files, searched, filtered, sorted and paged."""
