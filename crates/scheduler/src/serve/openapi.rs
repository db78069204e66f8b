//! The description of the API, made of the handlers' attributes and of the types that they take and answer.

use ondeck_api::wire::{RefusalCode, VERSION};
use serde_json::{Map, Value, json};
use utoipa::openapi::schema::Schema;
use utoipa::openapi::{
    ContentBuilder, InfoBuilder, LicenseBuilder, OpenApi, Ref, RefOr, Response, ResponseBuilder,
    ServerBuilder,
};

use super::routes::routes;

const ABOUT: &str = "On the Unix socket (`socket` in the part [scheduler] of the configuration) the kernel says who calls: \
    `curl --unix-socket /run/ondeck/scheduler.sock http://localhost/v1/jobs`. Over TCP every request carries a MUNGE \
    credential for method, path and body, and every answer one for the caller; `ondeck status`, `ondeck job` and the others \
    do that.";

/// The document of the routes.
fn document() -> OpenApi {
    let mut document = routes().into_openapi();
    let license = LicenseBuilder::new().name("Apache 2.0").identifier(Some("Apache-2.0")).build();
    let info = InfoBuilder::new().title("Ondeck: the scheduler").version(VERSION).license(Some(license));
    document.info = info.description(Some(ABOUT)).build();
    let socket = ServerBuilder::new().url("http://localhost").description(Some("By the Unix socket"));
    document.servers = Some(vec![socket.build()]);
    for item in document.paths.paths.values_mut() {
        for operation in [&mut item.get, &mut item.post, &mut item.delete].into_iter().flatten() {
            operation.responses.responses.insert("default".to_owned(), RefOr::T(refused()));
        }
    }
    if let Some(RefOr::T(Schema::Object(codes))) =
        document.components.as_mut().and_then(|components| components.schemas.get_mut("RefusalCode"))
    {
        let about = codes.description.clone().unwrap_or_default();
        codes.description =
            Some(format!("{about} With the HTTP status of each: {}", statuses(&codes.enum_values)));
    }
    document
}

/// What every route may answer instead.
fn refused() -> Response {
    let refusal = ContentBuilder::new().schema(Some(Ref::from_schema_name("Refusal"))).build();
    ResponseBuilder::new()
        .description(
            "Refused: the HTTP status goes with the code; a job that is not the caller's is not found",
        )
        .content("application/json", refusal)
        .build()
}

/// The codes of refusals with their HTTP status.
fn statuses(codes: &Option<Vec<Value>>) -> String {
    let told = |code: &Value| {
        let known: RefusalCode = serde_json::from_value(code.clone()).ok()?;
        Some(format!("{} {}", code.as_str()?, known.status()))
    };
    codes.iter().flatten().filter_map(told).collect::<Vec<_>>().join(", ")
}

/// The document, for programs.
pub(super) fn value() -> Value {
    // All of it has a form in JSON.
    let mut document = serde_json::to_value(document()).unwrap_or_default();
    let schemas = &mut document["components"]["schemas"];
    let named = schemas.as_object().cloned().unwrap_or_default();
    for schema in schemas.as_object_mut().into_iter().flat_map(Map::values_mut) {
        if let Some(fields) = schema.get_mut("properties") {
            refer(fields, &named);
        }
    }
    document
}

/// Names the words that have a name: utoipa writes them out where they stand within a tuple.
fn refer(value: &mut Value, named: &Map<String, Value>) {
    let name = value.get("enum").and_then(|_| named.iter().find(|(_, schema)| *schema == value));
    if let Some((name, _)) = name {
        *value = json!({ "$ref": format!("#/components/schemas/{name}") });
        return;
    }
    match value {
        Value::Object(fields) => fields.values_mut().for_each(|field| refer(field, named)),
        Value::Array(list) => list.iter_mut().for_each(|item| refer(item, named)),
        _ => {}
    }
}

/// The document, to be printed.
pub fn text() -> String {
    format!("{:#}\n", value())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use ondeck_api::scheduler::{
        AllocationView, BurstBufferAnswer, BurstBufferQuestion, Drain, Forgotten, Hook, HookAnswer,
        JobStatus, JobView, LayoutRun, LogLine, LostPart, NodeStatus, OtherLife, PartView, Status, Transfer,
        Usage, Waited, Warning,
    };
    use ondeck_api::wire::Refusal;
    use ondeck_core::Owner;
    use ondeck_core::schedule::{JobState, NodeState, RsaState};
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::Value;

    fn document() -> Value {
        super::value()
    }

    #[test]
    fn every_route_says_what_it_does_who_may_and_what_it_answers() {
        let document = document();
        let (mut routes, mut names) = (0, BTreeSet::new());
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let text = |name: &str| operation[name].as_str().unwrap_or_default().to_owned();
                assert!(!text("summary").is_empty(), "{method} {path}");
                assert!(text("description").contains("Who: "), "{method} {path}");
                let responses = operation["responses"].as_object().unwrap();
                assert!(responses["200"]["content"].is_object(), "{method} {path}");
                let refusal = &responses["default"]["content"]["application/json"]["schema"]["$ref"];
                assert_eq!(refusal, "#/components/schemas/Refusal", "{method} {path}");
                let open = path.matches('{').count();
                let parameters = operation["parameters"].as_array().into_iter().flatten();
                assert_eq!(parameters.filter(|told| told["in"] == "path").count(), open, "{method} {path}");
                routes += 1;
                names.insert(text("operationId"));
            }
        }
        assert_eq!((routes, names.len()), (19, 19));
    }

    #[test]
    fn the_status_of_each_code_of_a_refusal_is_told() {
        let codes = &document()["components"]["schemas"]["RefusalCode"];
        let told = codes["description"].as_str().unwrap();
        assert!(told.contains("malformed 400") && told.contains("too_large 507"), "{told}");
        assert_eq!(told.matches(", ").count() + 1, codes["enum"].as_array().unwrap().len(), "{told}");
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let (document, text) = (document(), super::text());
        assert!(text.contains("\"$ref\": \"#"));
        for reference in text.split("\"$ref\": \"#").skip(1) {
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
        is::<JobView>("JobView");
        is::<AllocationView>("AllocationView");
        is::<PartView>("PartView");
        is::<Transfer>("Transfer");
        is::<NodeStatus>("NodeStatus");
        is::<LogLine>("LogLine");
        is::<LostPart>("LostPart");
        is::<OtherLife>("OtherLife");
        is::<Waited>("Waited");
        is::<Warning>("Warning");
        is::<Usage>("Usage");
        is::<LayoutRun>("LayoutRun");
        is::<Forgotten>("Forgotten");
        is::<Drain>("Drain");
        is::<Hook>("Hook");
        is::<HookAnswer>("HookAnswer");
        is::<BurstBufferQuestion>("BurstBufferQuestion");
        is::<BurstBufferAnswer>("BurstBufferAnswer");
    }

    #[test]
    fn the_states_are_all_there() {
        let document = document();
        let phases = &document["components"]["schemas"]["JobStory"]["properties"]["phases"];
        assert_eq!(phases["items"]["prefixItems"][0]["$ref"], "#/components/schemas/RsaState", "{phases}");
        for (name, words) in
            [("JobState", JobState::WORDS), ("RsaState", RsaState::WORDS), ("NodeState", NodeState::WORDS)]
        {
            let told: Vec<String> =
                serde_json::from_value(document["components"]["schemas"][name]["enum"].clone()).unwrap();
            assert_eq!(told, words, "{name}");
        }
    }
}
