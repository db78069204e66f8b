//! The description of the API as a page for people: plain HTML, without scripts, and with nothing from elsewhere.

use std::fmt::Write as _;

use serde_json::Value;

const STYLE: &str = "body{max-width:60em;margin:2em auto;padding:0 1em;font-family:sans-serif;line-height:1.4}\
    table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left;vertical-align:top}\
    pre{background:#f4f4f4;padding:.6em;overflow:auto}h3{margin-top:2em}";

/// What is said of a schema whose form the page does not know.
const UNKNOWN: &str = "any value";

/// The page of an OpenAPI document.
pub(super) fn page(document: &Value) -> String {
    let title = text(&document["info"]["title"]);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n<p>{}</p>\n",
        text(&document["info"]["description"])
    );
    let (mut list, mut routes) = (String::new(), String::new());
    for (path, methods) in fields(&document["paths"]) {
        for (method, operation) in fields(methods) {
            let name = format!("{} {}", method.to_uppercase(), escaped(path));
            let (id, summary) = (text(&operation["operationId"]), text(&operation["summary"]));
            let _ = writeln!(
                list,
                "<tr><td><a href=\"#{id}\"><code>{name}</code></a></td><td>{summary}</td></tr>"
            );
            let _ = writeln!(routes, "<h3 id=\"{id}\"><code>{name}</code></h3>\n<p>{summary}</p>");
            route(&mut routes, operation);
        }
    }
    let _ = write!(page, "<h2>Routes</h2>\n<table>\n{list}</table>\n{routes}<h2>Types</h2>\n");
    for (name, schema) in fields(&document["components"]["schemas"]) {
        let name = escaped(name);
        let _ = writeln!(page, "<h3 id=\"type-{name}\">{name}</h3>\n<p>{}</p>", text(&schema["description"]));
        made_of(&mut page, schema);
    }
    page + "</body>\n</html>\n"
}

/// What a route takes and answers.
fn route(page: &mut String, operation: &Value) {
    for part in operation["description"].as_str().unwrap_or_default().split("\n\n") {
        let _ = writeln!(page, "<p>{}</p>", worded(part));
    }
    let mut rows = String::new();
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        let (schema, place) = (&parameter["schema"], text(&parameter["in"]));
        let default = match &schema["default"] {
            Value::Null => String::new(),
            value => format!("; {value} if absent"),
        };
        let _ = writeln!(
            rows,
            "<tr><td><code>{}</code></td><td>in the {place}</td><td>{}{}</td><td>{}</td></tr>",
            text(&parameter["name"]),
            kind(schema),
            escaped(&default),
            text(&parameter["description"])
        );
    }
    for content in contents(&operation["requestBody"]) {
        let _ = writeln!(rows, "<tr><td></td><td>the body</td><td>{content}</td><td></td></tr>");
    }
    for (status, response) in fields(&operation["responses"]) {
        let what = contents(response).join(", ");
        let status = if status == "default" { "else" } else { status };
        let about = text(&response["description"]);
        let _ =
            writeln!(rows, "<tr><td>{status}</td><td>the answer</td><td>{what}</td><td>{about}</td></tr>");
    }
    let _ = writeln!(page, "<table>\n{rows}</table>");
}

/// What a body has, for each of its media types.
fn contents(body: &Value) -> Vec<String> {
    let told = fields(&body["content"]).map(|(media, content)| {
        let kind = kind(&content["schema"]);
        if media == "application/json" { kind } else { format!("{kind} ({})", escaped(media)) }
    });
    told.collect()
}

/// What a type is made of, and an example.
fn made_of(page: &mut String, schema: &Value) {
    let required = schema["required"].as_array();
    if schema["properties"].is_object() {
        page.push_str("<table>\n");
        for (name, field) in fields(&schema["properties"]) {
            let is_required = required.is_some_and(|all| all.iter().any(|one| one == name));
            let _ = writeln!(
                page,
                "<tr><td><code>{}</code></td><td>{}{}</td><td>{}</td></tr>",
                escaped(name),
                kind(field),
                if is_required { "" } else { ", may be absent" },
                about(field)
            );
        }
        page.push_str("</table>\n");
    } else {
        let _ = writeln!(page, "<p>{}</p>", kind(schema));
    }
    for example in schema["examples"].as_array().into_iter().flatten() {
        let example = serde_json::to_string_pretty(example).unwrap_or_default();
        let _ = writeln!(page, "<pre>{}</pre>", escaped(&example));
    }
}

/// What is said of a field: of one that may be null it stands with what it is otherwise.
fn about(field: &Value) -> String {
    let mut places = std::iter::once(field).chain(field["oneOf"].as_array().into_iter().flatten());
    places.find_map(|place| place["description"].as_str()).map(worded).unwrap_or_default()
}

/// A schema in a few words.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|to| to.rsplit('/').next()) {
        let name = escaped(name);
        return format!("<a href=\"#type-{name}\">{name}</a>");
    }
    let list = |of: &Value| of.as_array().into_iter().flatten().map(kind).collect::<Vec<_>>();
    for choice in ["oneOf", "anyOf"] {
        if schema[choice].is_array() {
            return list(&schema[choice]).join(" or ");
        }
    }
    if let Some(words) = schema["enum"].as_array() {
        let words: Vec<String> = words.iter().map(|word| format!("<code>{}</code>", text(word))).collect();
        return words.join(", ");
    }
    let named = |name: &str| match name {
        "array" if schema["prefixItems"].is_array() => {
            format!("[{}]", list(&schema["prefixItems"]).join(", "))
        }
        "array" => format!("list of {}", kind(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("of each name: {}", kind(&schema["additionalProperties"]))
        }
        other => escaped(other),
    };
    match &schema["type"] {
        Value::String(name) => named(name),
        Value::Array(names) => {
            names.iter().filter_map(Value::as_str).map(named).collect::<Vec<_>>().join(" or ")
        }
        _ => UNKNOWN.to_owned(),
    }
}

fn fields(object: &Value) -> impl Iterator<Item = (&String, &Value)> {
    object.as_object().into_iter().flatten()
}

/// A text of the document.
fn text(value: &Value) -> String {
    worded(value.as_str().unwrap_or_default())
}

/// A text with what stands between backticks as code.
fn worded(text: &str) -> String {
    let parts = escaped(text);
    let parts = parts.split('`').enumerate();
    parts
        .map(|(at, part)| if at % 2 == 1 { format!("<code>{part}</code>") } else { part.to_owned() })
        .collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn document() -> Value {
        crate::serve::openapi::value()
    }

    #[test]
    fn the_page_holds_every_route_and_every_type_and_its_links_lead_somewhere() {
        let (document, page) = (document(), page(&document()));
        for (path, methods) in fields(&document["paths"]) {
            for (method, operation) in fields(methods) {
                let id = operation["operationId"].as_str().unwrap();
                let heading = format!("<h3 id=\"{id}\"><code>{} {path}</code></h3>", method.to_uppercase());
                assert!(page.contains(&heading), "{heading}");
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    assert!(page.contains(&format!("<td><code>{}</code></td>", text(&parameter["name"]))));
                }
            }
        }
        for (name, schema) in fields(&document["components"]["schemas"]) {
            assert!(page.contains(&format!("<h3 id=\"type-{name}\">{name}</h3>")), "{name}");
            for (field, schema) in fields(&schema["properties"]) {
                assert!(page.contains(&format!("<td><code>{field}</code></td>")), "{name}: {field}");
                assert!(!about(schema).is_empty(), "{name}: {field}");
            }
        }
        let after = |key: &'static str| page.split(key).skip(1).map(|rest| rest.split('"').next().unwrap());
        let places: BTreeSet<&str> = after("id=\"").collect();
        assert!(after("href=\"#").all(|to| places.contains(to)));
        assert!(after("href=\"").all(|to| to.starts_with('#')) && !page.contains("<script"));
        assert!(!page.contains(UNKNOWN), "a schema has a form that the page does not know");
    }

    #[test]
    fn what_a_text_has_of_html_is_shown_and_not_obeyed() {
        assert_eq!(worded("a `b < c` & \"d\""), "a <code>b &lt; c</code> &amp; &quot;d&quot;");
    }

    #[test]
    fn a_schema_is_told_in_a_few_words() {
        for (schema, wanted) in [
            (serde_json::json!({ "type": ["integer", "null"] }), "integer or null"),
            (serde_json::json!({ "type": "array", "items": { "type": "string" } }), "list of string"),
            (
                serde_json::json!({ "type": "array", "prefixItems": [{ "type": "string" }, { "type": "number" }] }),
                "[string, number]",
            ),
            (
                serde_json::json!({ "oneOf": [{ "type": "null" }, { "$ref": "#/components/schemas/A" }] }),
                "null or <a href=\"#type-A\">A</a>",
            ),
        ] {
            assert_eq!(kind(&schema), wanted);
        }
    }
}
