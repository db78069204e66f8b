//! `ondeck-attack`: what somebody who means harm would run on a node, for the conformance suite.
//!
//! `crowd` takes all the connections that it gets; `pass-off` stands at the port of a daemon and gives the answers of
//! another one for that one's.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use ondeck_api::envelope;
use ondeck_api::munge::Munge;
use ondeck_core::NodeName;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// Attacks a daemon from inside a host, for the conformance suite.
#[derive(Parser)]
enum AttackCommand {
    /// Hold connections that say nothing, and make those that are closed anew, until it is killed. Prints `ready` once all
    /// have been tried.
    Crowd {
        /// `ADDRESS:PORT`.
        #[arg(long)]
        daemon: SocketAddr,
        /// The addresses to come from.
        #[arg(long, value_delimiter = ',')]
        from: Vec<IpAddr>,
        /// Connections from each.
        #[arg(long)]
        each: usize,
    },
    /// Send messages without an end to a server of a RAM disk, over several connections that know no secret, and over new ones
    /// when they are closed, until it is killed. Prints `ready` once each connection has sent, or was refused.
    Records {
        /// `ADDRESS:PORT` of the brick.
        #[arg(long)]
        brick: SocketAddr,
        /// How many connections.
        #[arg(long)]
        connections: usize,
        /// Connections that say nothing, beside them.
        #[arg(long)]
        idle: usize,
    },
    /// Answer requests with what another daemon answers to them, until it is killed. Prints `ready` when it listens.
    PassOff {
        /// `ADDRESS:PORT`.
        #[arg(long)]
        listen: SocketAddr,
        /// `ADDRESS:PORT` of the other daemon.
        #[arg(long)]
        daemon: SocketAddr,
        #[command(subcommand)]
        how: How,
    },
}

#[derive(Clone, Subcommand)]
enum How {
    /// As they come.
    Unread,
    /// Decoded, which root alone can, and sealed again for the other daemon with the same random number.
    Resealed {
        /// The name of the other daemon's node.
        #[arg(long)]
        node: NodeName,
        #[arg(long)]
        munge: PathBuf,
    },
}

fn main() -> ExitCode {
    let done = match AttackCommand::parse() {
        AttackCommand::Crowd { daemon, from, each } => crowd(daemon, &from, each),
        AttackCommand::Records { brick, connections, idle } => records(brick, connections, idle),
        AttackCommand::PassOff { listen, daemon, how } => pass_off(listen, daemon, &how),
    };
    let Err(error) = done;
    eprintln!("ondeck-attack: {error:#}");
    ExitCode::FAILURE
}

fn ready() {
    println!("ready");
}

/// The size that a message announces: somewhat below the greatest that Gluster takes.
const RECORD: usize = 0x3000_0000;

fn records(brick: SocketAddr, connections: usize, idle: usize) -> Result<std::convert::Infallible> {
    let _silent: Vec<TcpStream> = (0..idle)
        .map(|_| TcpStream::connect(brick).with_context(|| format!("can't connect to {brick}")))
        .collect::<Result<_>>()?;
    let (tell, told) = std::sync::mpsc::channel();
    for _ in 0..connections {
        let tell = tell.clone();
        std::thread::spawn(move || {
            loop {
                // What is refused is tried again.
                let _ = record(brick);
                let _ = tell.send(());
                std::thread::sleep(Duration::from_millis(50));
            }
        });
    }
    for _ in 0..connections {
        told.recv()?;
    }
    ready();
    loop {
        std::thread::park();
    }
}

/// Sends all but the end of one message, and holds the connection for a while.
fn record(brick: SocketAddr) -> Result<()> {
    let mut stream = TcpStream::connect(brick)?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    // RFC 5531: the size of a fragment that is the last one; a call of version 2; no credential and no verifier.
    let size = RECORD as u32 | 1 << 31;
    let call: [u32; 11] = [size, 1, 0, 2, 1, 1, 1, 0, 0, 0, 0];
    stream.write_all(&call.map(u32::to_be_bytes).concat())?;
    let zeros = vec![0; 1 << 20];
    for _ in 0..RECORD / zeros.len() - 1 {
        stream.write_all(&zeros)?;
    }
    std::thread::sleep(Duration::from_secs(2));
    Ok(())
}

fn crowd(daemon: SocketAddr, from: &[IpAddr], each: usize) -> Result<std::convert::Infallible> {
    let mut held: Vec<Option<TcpStream>> = Vec::new();
    held.resize_with(from.len() * each, || None);
    let mut is_first = true;
    loop {
        for (number, slot) in held.iter_mut().enumerate() {
            if slot.as_ref().is_none_or(is_closed) {
                *slot = connect_from(from[number / each], daemon).ok();
            }
        }
        if std::mem::take(&mut is_first) {
            ready();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn connect_from(own: IpAddr, daemon: SocketAddr) -> Result<TcpStream> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &SocketAddr::new(own, 0))?;
    connect(&socket, &daemon)?;
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(true)?;
    Ok(stream)
}

fn is_closed(stream: &TcpStream) -> bool {
    !matches!(stream.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn pass_off(listen: SocketAddr, daemon: SocketAddr, how: &How) -> Result<std::convert::Infallible> {
    let listener = TcpListener::bind(listen)?;
    ready();
    loop {
        let (mut victim, _) = listener.accept()?;
        let answered = read_request(&mut victim).and_then(|(head, body)| {
            let head = match how {
                How::Unread => head,
                How::Resealed { node, munge } => reseal(&head, node, &Munge::new(munge))?,
            };
            let mut other = TcpStream::connect(daemon)?;
            other.write_all(head.as_bytes())?;
            other.write_all(&body)?;
            std::io::copy(&mut other, &mut victim)?;
            Ok(())
        });
        if let Err(error) = answered {
            eprintln!("ondeck-attack: {error:#}");
        }
    }
}

/// The head, which asks for one answer and no more, and the body.
fn read_request(victim: &mut TcpStream) -> Result<(String, Vec<u8>)> {
    const END: &str = "\r\n\r\n";
    let mut head = Vec::new();
    while !head.ends_with(END.as_bytes()) {
        let mut byte = [0];
        victim.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let head = String::from_utf8(head)?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
    let mut body = vec![0; length.parse()?];
    victim.read_exact(&mut body)?;
    Ok((head.replacen(END, "\r\nconnection: close\r\n\r\n", 1), body))
}

fn reseal(head: &str, node: &NodeName, munge: &Munge) -> Result<String> {
    let start = format!("{}: ", envelope::REQUEST_HEADER);
    let credential =
        head.lines().find_map(|line| line.strip_prefix(&start)).context("the request has no credential")?;
    let mut request: envelope::Request = serde_json::from_slice(&munge.decode(credential)?.payload)?;
    request.to = node.clone();
    let again = munge.encode(&serde_json::to_vec(&request)?, Some(0), envelope::TIME_TO_LIVE)?;
    Ok(head.replacen(credential, &again, 1))
}
