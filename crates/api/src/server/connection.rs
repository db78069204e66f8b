//! One connection, which is given up if the other end says or takes nothing for too long.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::answer::handle;
use super::{Daemon, PATIENCE, Peer};

/// How long the headers of a request may take to come, from the beginning of a connection or the end of the last answer.
pub(super) const SILENCE: Duration = Duration::from_secs(5);

/// The most that is read ahead of one connection. A credential with its request has a few kilobytes.
pub(super) const MOST_BUFFERED: usize = 64 << 10;

/// Answers what comes by a connection, until it is closed or says nothing for a while.
pub(super) async fn converse<I>(daemon: Arc<Daemon>, peer: Peer, stream: I)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let daemon = Arc::clone(&daemon);
        async move { Ok::<_, Infallible>(handle(daemon, peer, request.map(Body::new)).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // Also for the next request by the same connection.
        .header_read_timeout(SILENCE)
        .max_buf_size(MOST_BUFFERED)
        .serve_connection(TokioIo::new(Impatient { stream, full: None }), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, ?peer, "a connection broke");
    }
}

/// A connection that is given up if the other end does not take what it is told.
struct Impatient<I> {
    stream: I,
    /// Until when there must be room, since there is none.
    full: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl<I> Impatient<I> {
    fn bounded<T>(
        &mut self,
        context: &mut Context<'_>,
        done: Poll<std::io::Result<T>>,
    ) -> Poll<std::io::Result<T>> {
        if done.is_ready() {
            self.full = None;
            return done;
        }
        let full = self.full.get_or_insert_with(|| Box::pin(tokio::time::sleep(PATIENCE)));
        full.as_mut().poll(context).map(|()| Err(std::io::ErrorKind::TimedOut.into()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Impatient<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Impatient<I> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.bounded(context, done)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_flush(context);
        this.bounded(context, done)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_shutdown(context);
        this.bounded(context, done)
    }
}
