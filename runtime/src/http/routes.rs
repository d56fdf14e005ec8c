//! Every route of the server, as a table: what is registered is what the tests enumerate.

use actix_web::http::Method;
use actix_web::{guard, web, HttpRequest, HttpResponse, Route};

use super::error::ApiError;
use super::{chat, completions, probes, responses, tokenize};

pub(crate) struct Endpoint {
    pub(crate) method: Method,
    pub(crate) path: &'static str,
    handler: fn(Route) -> Route,
}

/// Rows of the same path stand together. HEAD goes wherever GET goes.
pub(crate) fn endpoints() -> Vec<Endpoint> {
    let row = |method, path, handler| Endpoint { method, path, handler };
    vec![
        row(Method::POST, "/v1/responses", |route| route.to(responses::create)),
        row(Method::GET, "/v1/responses/{id}", |route| route.to(responses::get)),
        row(Method::DELETE, "/v1/responses/{id}", |route| route.to(responses::delete)),
        row(Method::GET, "/v1/responses/{id}/input_items", |route| route.to(responses::input_items)),
        row(Method::POST, "/v1/chat/completions", |route| route.to(chat::create)),
        row(Method::POST, "/v1/completions", |route| route.to(completions::create)),
        row(Method::GET, "/v1/models", |route| route.to(probes::models)),
        // Model names may hold slashes.
        row(Method::GET, "/v1/models/{id:.+}", |route| route.to(probes::model)),
        row(Method::POST, "/tokenize", |route| route.to(tokenize::tokenize)),
        row(Method::POST, "/detokenize", |route| route.to(tokenize::detokenize)),
        row(Method::GET, "/health", |route| route.to(probes::health)),
        row(Method::GET, "/ready", |route| route.to(probes::ready)),
        row(Method::GET, "/metrics", |route| route.to(probes::metrics)),
    ]
}

pub(crate) fn configure(config: &mut web::ServiceConfig) {
    for endpoints in endpoints().chunk_by(|a, b| a.path == b.path) {
        let mut resource = web::resource(endpoints[0].path);
        let mut allow = Vec::new();
        for endpoint in endpoints {
            allow.push(endpoint.method.as_str());
            let mut methods = guard::Any(guard::Method(endpoint.method.clone()));
            if endpoint.method == Method::GET {
                allow.push("HEAD");
                methods = methods.or(guard::Head());
            }
            resource = resource.route((endpoint.handler)(web::route().guard(methods)));
        }
        let allow = allow.join(", ");
        config.service(resource.default_service(web::to(move |request: HttpRequest| {
            let refused = ApiError::method_not_allowed(request.method().as_str(), request.path(), &allow);
            async move { Err::<HttpResponse, _>(refused) }
        })));
    }
}

pub(crate) async fn not_found(request: HttpRequest) -> Result<HttpResponse, ApiError> {
    Err(ApiError::route_not_found(&request.path().chars().take(200).collect::<String>()))
}
