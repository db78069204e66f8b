//! What the keeper and the command in front say to each other: one JSON object a line, over a Unix socket.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// From the keeper to whoever watches. With `--json` these lines are what the user gets.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum Message {
    /// A phase begins.
    Phase {
        /// `stage_in`, `program`, `stage_out`, `write_back`, …
        name: String,
        /// Bytes that it will move, if known.
        total_bytes: Option<u64>,
    },
    /// How far the phase is.
    Progress { files: u64, files_found: u64, bytes: u64, bytes_found: u64 },
    /// Something worth knowing.
    Note { text: String },
    /// Something that went wrong or was decided otherwise than asked.
    Warning { text: String },
    /// The program was started.
    ProgramStarted { pid: u32 },
    /// The program has ended; its results are being staged out.
    ProgramEnded {
        /// Its exit code; 128 + n for signal n.
        exit_code: u8,
    },
    /// Nothing is left to do but to remove the run's own traces. For the command alone, which does that if the keeper
    /// can't.
    Ended {
        /// What `ondeck run` exits with.
        exit_code: u8,
        /// The last line for people.
        summary: String,
    },
    /// The run is over and everything is where it belongs.
    Finished {
        /// What `ondeck run` exits with.
        exit_code: u8,
        /// The last line for people.
        summary: String,
    },
    /// The results are not all on disk; the keeper holds them.
    Held {
        /// What `ondeck run` exits with.
        exit_code: u8,
        /// What happened and what to do.
        text: String,
    },
}

/// From the command in front to the keeper.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum RunOrder {
    /// Pass a signal on to the program; before it runs, end the run.
    Signal { number: i32 },
    /// Try the stage-out of held results again.
    Resume,
    /// Give the results up.
    Abandon,
}

/// A socket that carries lines, and keeps what has arrived of the next one.
pub struct Line {
    stream: UnixStream,
    pending: Vec<u8>,
}

impl Line {
    /// Reading never blocks; writing does so for at most a second, after which a stuck reader is given up.
    pub fn new(stream: UnixStream) -> io::Result<Line> {
        stream.set_write_timeout(Some(std::time::Duration::from_secs(1)))?;
        Ok(Line { stream, pending: Vec::new() })
    }

    /// The socket, to be waited on.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends one message.
    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }

    /// The messages that have arrived; `None` once the other end is gone. Call it when the socket is readable.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Option<Vec<T>> {
        let mut buffer = [0; 4096];
        let read = match self.stream.read(&mut buffer) {
            Ok(0) => return None,
            Ok(read) => read,
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => 0,
            Err(_) => return None,
        };
        self.pending.extend_from_slice(&buffer[..read]);
        let mut messages = Vec::new();
        while let Some(end) = self.pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            // A line that can't be parsed is from another version of the command; it is passed over.
            messages.extend(serde_json::from_slice(&line));
        }
        Some(messages)
    }
}
