//! A changed configuration is taken over while the daemon runs.

use std::sync::Arc;

use ondeck_api::Config;
use ondeck_api::reload::{self, HangUps, ReadAgain, Reloaded};
use ondeck_core::schedule::Event;

use crate::context::Context;

/// Takes over what it can of a configuration. What is under way goes on as it has begun.
fn take_over(context: &Context, new: &Config) -> Result<Reloaded, String> {
    let reloaded = context.config().reload_scheduler(new)?;
    let site = reloaded.config.scheduler.site(&reloaded.config.nodes)?;
    let mut schedule = context.schedule();
    schedule.set_site(site);
    context.set_config(reloaded.config.clone());
    Ok(reloaded)
}

/// Takes over what it can of a changed configuration, at each SIGHUP.
pub(crate) async fn watch(context: Arc<Context>, mut hang_ups: HangUps, read_again: ReadAgain) {
    while hang_ups.next().await {
        let (of, read_again) = (Arc::clone(&context), Arc::clone(&read_again));
        let reload = tokio::task::spawn_blocking(move || {
            read_again().map_err(|error| error.to_string()).and_then(|new| take_over(&of, &new))
        });
        match reload.await {
            Ok(Ok(reloaded)) => {
                reloaded.log("ondeck serve");
                // Who waits may have what is waited for, and another time may be the next.
                let _ = context.event(Event::Tick).await;
                context.look_at_the_time();
            }
            Ok(Err(why)) => reload::log_refused(&why),
            Err(error) => reload::log_refused(&error.to_string()),
        }
    }
}
