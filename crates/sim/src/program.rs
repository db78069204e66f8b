//! The steps of a job's program: it reads, computes, writes a checkpoint, computes, and so on, and writes its output.

use ondeck_core::Bytes;

use crate::io::JobIo;

/// One step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It reads its input.
    Read(Bytes),
    /// It computes for so many milliseconds.
    Compute(u64),
    /// It writes a checkpoint.
    Checkpoint(Bytes),
    /// It writes its output.
    Output(Bytes),
}

/// The step of a number, from 0; nothing after the last.
pub fn step(io: &JobIo, number: u32) -> Option<Step> {
    let parts = u64::from(io.checkpoints) + 1;
    let number = u64::from(number);
    match number {
        0 => Some(Step::Read(io.input)),
        _ if number > 2 * parts => None,
        _ if number % 2 == 1 => {
            let part = u128::from(number / 2);
            let until = |part: u128| (u128::from(io.compute_ms) * part / u128::from(parts)) as u64;
            Some(Step::Compute(until(part + 1) - until(part)))
        }
        _ if number == 2 * parts => Some(Step::Output(io.output)),
        _ => Some(Step::Checkpoint(io.checkpoint)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn computing_is_shared_out_among_checkpoints_to_the_last_millisecond() {
        let io = JobIo {
            input: Bytes(1),
            checkpoint: Bytes(2),
            checkpoints: 2,
            output: Bytes(3),
            compute_ms: 100,
        };
        let steps: Vec<Step> = (0..).map_while(|number| step(&io, number)).collect();
        use Step::{Checkpoint, Compute, Output, Read};
        let expected = [
            Read(Bytes(1)),
            Compute(33),
            Checkpoint(Bytes(2)),
            Compute(33),
            Checkpoint(Bytes(2)),
            Compute(34),
            Output(Bytes(3)),
        ];
        assert_eq!(steps, expected);
    }
}
