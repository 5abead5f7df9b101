-- A life is proven by the lock of the very file that it locked. A row of an older gracekit names
-- none: only the process table can prove its death.
ALTER TABLE run ADD COLUMN lock_file TEXT;    -- device:inode in hexadecimal digits
ALTER TABLE run ADD COLUMN time_ns INTEGER;   -- inode of the time namespace of start_ticks
-- An operator's word that a run is gone whose death nobody can prove.
ALTER TABLE run ADD COLUMN gone_at REAL;
ALTER TABLE run ADD COLUMN gone_by TEXT;
ALTER TABLE run ADD COLUMN gone_reason TEXT;
