//! From the owner's answers to the kernel's replies, where several requests have the same.

use std::sync::Arc;

use fuser::{ReplyAttr, ReplyData, ReplyDirectoryPlus, ReplyEmpty, ReplyWrite, ReplyXattr};
use rustix::io::Errno;

use super::convert;
use super::directories::{self, Directory, fill_with_attributes};
use super::shared::Shared;
use crate::message::{Attributes, Caller, Ino, Listed, Reply, Request};

/// What an answer that is not the expected one is called.
pub fn failed(answer: Result<Reply, Errno>) -> fuser::Errno {
    match answer {
        Err(errno) => convert::error(errno),
        Ok(reply) => {
            tracing::error!(?reply, "the owner answers something else than it was asked for");
            fuser::Errno::EIO
        }
    }
}

pub fn done(reply: ReplyEmpty, result: Result<Reply, Errno>) {
    match result {
        Ok(Reply::Done) => reply.ok(),
        other => reply.error(failed(other)),
    }
}

pub fn xattr(reply: ReplyXattr, size: u32, result: Result<Reply, Errno>) {
    match result {
        Ok(Reply::Data(value)) => match u32::try_from(value.len()) {
            Ok(length) if size == 0 => reply.size(length),
            Ok(length) if length <= size => reply.data(&value),
            _ => reply.error(fuser::Errno::ERANGE),
        },
        other => reply.error(failed(other)),
    }
}

/// Answers with entries of a directory that was listed, and their attributes, having asked for so many.
pub fn with_attributes(
    shared: &Arc<Shared>,
    caller: Caller,
    (directory, ino): (Arc<Directory>, Ino),
    listed: Arc<Vec<Listed>>,
    (offset, count): (u64, usize),
    reply: ReplyDirectoryPlus,
) {
    let Some(service) = shared.service.get() else { return reply.error(fuser::Errno::EIO) };
    let names = directories::names(&listed, offset, count);
    let request = Request::Entries { ino, names: names.clone() };
    let shared = Arc::clone(shared);
    let answer = move |result| match (result, shared.service.get()) {
        (Ok(Reply::Entries(found)), _) if directories::says_nothing(&found, offset) => {
            // All were removed since. Ever more are asked for, so that there are few such rounds within each other.
            let next = (offset + found.len() as u64, count * 2);
            with_attributes(&shared, caller, (directory, ino), listed, next, reply);
        }
        (Ok(Reply::Entries(found)), Some(service)) => {
            let attributes = |of: &Attributes| shared.attributes(of);
            let surplus =
                fill_with_attributes(reply, attributes, (&directory, ino), (&names, &found), offset);
            service.forget(&surplus);
        }
        (other, _) => reply.error(failed(other)),
    };
    service.ask(caller, request, Box::new(answer));
}

pub fn attr(shared: &Shared, reply: ReplyAttr, result: Result<Reply, Errno>) {
    match result {
        Ok(Reply::Attributes(of)) => {
            let (attributes, kept) = shared.attributes(&of);
            reply.attr(&kept, &attributes);
        }
        other => reply.error(failed(other)),
    }
}

pub fn data(reply: ReplyData, result: Result<Reply, Errno>) {
    match result {
        Ok(Reply::Data(data)) => reply.data(&data),
        other => reply.error(failed(other)),
    }
}

pub fn written(reply: ReplyWrite, result: Result<Reply, Errno>) {
    match result {
        Ok(Reply::Written(length)) => reply.written(length),
        other => reply.error(failed(other)),
    }
}
