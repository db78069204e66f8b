//! What the description of the API says of types that are `ondeck-core`'s, which knows nothing of it.
//!
//! Each has the name of the type that it stands for. The words of states come from that type itself.

use std::borrow::Cow;

use ondeck_core::schedule;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType, Type};
use utoipa::{PartialSchema, ToSchema};

// Stands for core's type of that name; what is said of it is what readers of the API see.
/// A user, by numbers: names may differ from node to node.
#[derive(ToSchema)]
#[schema(examples(json!({ "uid": 20001, "gid": 20001 })))]
#[allow(dead_code)]
pub struct Owner {
    /// The user.
    uid: u32,
    /// The user's primary group.
    gid: u32,
}

macro_rules! words {
    ($($name:ident: $words:expr, $told:literal;)+) => { $(
        #[doc = concat!("Stands for `ondeck_core`'s `", stringify!($name), "`.")]
        pub struct $name;

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let object = ObjectBuilder::new().schema_type(SchemaType::Type(Type::String));
                object.description(Some($told)).enum_values(Some($words.iter().copied())).into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                Cow::Borrowed(stringify!($name))
            }
        }
    )+ };
}

words! {
    JobState: schedule::JobState::WORDS, "What the workload manager does with a job";
    RsaState: schedule::RsaState::WORDS, "What Ondeck does for a job; docs/admin.md explains each";
    NodeState: schedule::NodeState::WORDS, "What can be done with an RSA node";
    Purpose: ["input", "both", "output"], "What a RAM disk is for";
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_core::allocation;

    use super::*;

    #[test]
    fn a_purpose_is_told_as_it_is_written() {
        let all = [allocation::Purpose::Input, allocation::Purpose::Both, allocation::Purpose::Output];
        let schema = serde_json::to_value(Purpose::schema()).unwrap();
        assert_eq!(schema["enum"], serde_json::to_value(all).unwrap());
    }
}
