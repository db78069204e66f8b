//! EASY backfill by lists, as simply as it can be written: what the simulator is compared with.

use ondeck_sim::trace::Trace;

/// When each job starts, in seconds: second by second of what happens, who waits and who runs.
pub fn simple_easy(trace: &Trace, nodes: u32) -> Vec<u64> {
    let jobs = &trace.jobs;
    let mut started: Vec<Option<u64>> = vec![None; jobs.len()];
    let mut now = 0;
    loop {
        let runs = |index: usize, started: &[Option<u64>]| {
            started[index].is_some_and(|start| start <= now && now < start + jobs[index].run)
        };
        let free = |started: &[Option<u64>]| {
            let used: u32 =
                (0..jobs.len()).filter(|index| runs(*index, started)).map(|index| jobs[index].nodes).sum();
            nodes - used
        };
        let waits =
            |index: usize, started: &[Option<u64>]| started[index].is_none() && jobs[index].submitted <= now;
        // The first ones, as long as they fit.
        let head = loop {
            let Some(first) = (0..jobs.len()).find(|index| waits(*index, &started)) else { break None };
            if jobs[first].nodes > free(&started) {
                break Some(first);
            }
            started[first] = Some(now);
        };
        if let Some(head) = head {
            // When the head can start, if everybody takes all the time that was asked for; who takes longer ends any moment.
            let mut ends: Vec<(u64, u32)> = (0..jobs.len())
                .filter(|index| runs(*index, &started))
                .map(|index| {
                    let end = started[index].unwrap_or(0) + jobs[index].requested.unwrap_or(jobs[index].run);
                    (end.max(now), jobs[index].nodes)
                })
                .collect();
            ends.sort_unstable();
            let (mut at, mut there) = (now, free(&started));
            for (end, of_job) in &ends {
                if there >= jobs[head].nodes {
                    break;
                }
                (at, there) = (*end, there + of_job);
            }
            let there: u32 = free(&started)
                + ends.iter().filter(|(end, _)| *end <= at).map(|(_, of_job)| of_job).sum::<u32>();
            let mut spare = there - jobs[head].nodes;
            for index in 0..jobs.len() {
                if index == head || !waits(index, &started) || jobs[index].nodes > free(&started) {
                    continue;
                }
                let requested = jobs[index].requested.unwrap_or(jobs[index].run);
                if now + requested <= at {
                    started[index] = Some(now);
                } else if jobs[index].nodes <= spare {
                    spare -= jobs[index].nodes;
                    started[index] = Some(now);
                }
            }
        }
        let submissions = jobs.iter().map(|job| job.submitted);
        let ends = jobs.iter().zip(&started).filter_map(|(job, start)| Some((*start)? + job.run));
        match submissions.chain(ends).filter(|at| *at > now).min() {
            Some(next) => now = next,
            None => return started.into_iter().map(|start| start.unwrap_or(u64::MAX)).collect(),
        }
    }
}
