"""Rules of other systems on rhymerl's Scheduler, one a file, for tournament.py."""
