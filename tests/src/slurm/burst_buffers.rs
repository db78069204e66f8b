//! What slurmctld saves of burst buffers.

use std::fs;

use super::Slurm;

impl Slurm {
    /// Ends slurmctld by SIGKILL, as if that had been before it has saved any burst buffer, and starts it again. It saves burst
    /// buffers every 30 s, and jobs within 5 s: wait for those with [`wait_saved`](Slurm::wait_saved) before.
    ///
    /// # Panics
    ///
    /// If it is not running, or does not end or start.
    #[track_caller]
    pub fn lose_burst_buffers(&self) {
        self.kill_controller();
        let entries = fs::read_dir(&self.state).unwrap_or_else(|error| panic!("{error}"));
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with("burst_buffer_lua_state")
                && let Err(error) = fs::remove_file(entry.path())
            {
                panic!("{}: {error}", entry.path().display());
            }
        }
        self.start_controller();
    }
}
