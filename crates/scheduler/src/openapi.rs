//! The API as an OpenAPI document, written by hand and kept true by the tests below.

/// The document, JSON.
pub const DOCUMENT: &str = include_str!("openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ondeck_api::scheduler::{
        Drain, Hook, HookAnswer, JobStatus, LogLine, LostPart, NodeStatus, OtherLife, Status, Transfer,
        Usage, Waited, Warning,
    };
    use ondeck_api::wire::Refusal;
    use ondeck_core::Owner;
    use ondeck_core::schedule::{JobState, NodeState, RsaState};
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::Value;

    use super::DOCUMENT;

    fn document() -> Value {
        serde_json::from_str(DOCUMENT).unwrap()
    }

    /// The routes as `METHOD /v1/jobs/*`, read from the code that answers: a `*` stands for what is not fixed.
    fn routes() -> BTreeSet<String> {
        let code = include_str!("serve.rs");
        let arms = code.lines().filter_map(|line| line.trim().strip_prefix("(\"")?.split_once("\", ["));
        let mut routes = BTreeSet::new();
        for (method, rest) in arms {
            let segments = rest.split_once("]) =>").expect("a route ends in its line").0;
            let mut paths = vec![format!("{method} /v1")];
            for segment in segments.split(", ") {
                let words: Vec<&str> = match segment.contains('"') {
                    true => segment.split('"').skip(1).step_by(2).collect(),
                    false => vec!["*"],
                };
                let longer = |path: &String| words.iter().map(|word| format!("{path}/{word}")).collect();
                paths = paths.iter().flat_map(|path| -> Vec<String> { longer(path) }).collect();
            }
            routes.extend(paths);
        }
        routes
    }

    #[test]
    fn every_route_is_in_the_document_and_nothing_else() {
        let document = document();
        let mut told = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            let path: Vec<&str> =
                path.split('/').map(|part| if part.starts_with('{') { "*" } else { part }).collect();
            for method in methods.as_object().unwrap().keys() {
                told.insert(format!("{} {}", method.to_uppercase(), path.join("/")));
            }
        }
        let routes = routes();
        assert!(routes.len() > 10, "{routes:?}");
        assert_eq!(told, routes);
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = document();
        for reference in DOCUMENT.split("\"$ref\": \"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }

    /// The example of a schema is what the type writes, and its properties are the type's fields.
    #[track_caller]
    fn is<T: Serialize + DeserializeOwned>(name: &str) {
        let document = document();
        let schema = &document["components"]["schemas"][name];
        let example = &schema["examples"][0];
        let value: T =
            serde_json::from_value(example.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(serde_json::to_value(&value).unwrap(), *example, "{name}");
        let keys = |object: &Value| object.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(keys(&schema["properties"]), keys(example), "{name}");
        let required: BTreeSet<String> = serde_json::from_value(schema["required"].clone()).unwrap();
        assert_eq!(required, keys(example), "{name}");
    }

    #[test]
    fn what_is_asked_and_answered_looks_as_the_document_says() {
        is::<Refusal>("Refusal");
        is::<Owner>("Owner");
        is::<Status>("Status");
        is::<JobStatus>("JobStatus");
        is::<Transfer>("Transfer");
        is::<NodeStatus>("NodeStatus");
        is::<LogLine>("LogLine");
        is::<LostPart>("LostPart");
        is::<OtherLife>("OtherLife");
        is::<Waited>("Waited");
        is::<Warning>("Warning");
        is::<Usage>("Usage");
        is::<Drain>("Drain");
        is::<Hook>("Hook");
        is::<HookAnswer>("HookAnswer");
    }

    #[test]
    fn the_states_are_all_there() {
        let document = document();
        for (name, words) in
            [("JobState", JobState::WORDS), ("RsaState", RsaState::WORDS), ("NodeState", NodeState::WORDS)]
        {
            let told: Vec<String> =
                serde_json::from_value(document["components"]["schemas"][name]["enum"].clone()).unwrap();
            assert_eq!(told, words, "{name}");
        }
    }
}
