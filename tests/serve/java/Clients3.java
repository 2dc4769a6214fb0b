import com.alibaba.rocketmq.client.consumer.DefaultMQPullConsumer;
import com.alibaba.rocketmq.client.consumer.DefaultMQPushConsumer;
import com.alibaba.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import com.alibaba.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import com.alibaba.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import com.alibaba.rocketmq.client.consumer.listener.MessageListenerOrderly;
import com.alibaba.rocketmq.client.producer.DefaultMQProducer;
import com.alibaba.rocketmq.client.producer.SendStatus;
import com.alibaba.rocketmq.common.consumer.ConsumeFromWhere;
import com.alibaba.rocketmq.common.message.Message;
import com.alibaba.rocketmq.common.message.MessageExt;
import com.alibaba.rocketmq.common.message.MessageQueue;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;

/** The client of 2015 (3.2.6) against the server at args[0]. Prints lines as Clients does. */
public class Clients3 {
    static String server;
    static DefaultMQProducer producer;
    static Set<String> wanted;

    public static void main(String[] args) throws Exception {
        server = args[0];
        wanted = Set.of(args);
        producer = new DefaultMQProducer("producers");
        producer.setNamesrvAddr(server);
        producer.start();
        scenario("send", Clients3::send);
        scenario("push", Clients3::push);
        scenario("retry", Clients3::retry);
        scenario("order", Clients3::order);
        scenario("delay", Clients3::delay);
        scenario("pull", Clients3::pull);
        System.exit(0);
    }

    static void scenario(String name, Callable<String> run) {
        if (wanted.size() > 1 && !wanted.contains(name)) return;
        try {
            String wrong = run.call();
            System.out.println(wrong == null ? "ok " + name : "FAILED " + name + ": " + wrong);
        } catch (Throwable error) {
            System.out.println("FAILED " + name + ": " + error);
            error.printStackTrace();
        }
    }

    static boolean until(int seconds, Callable<Boolean> done) throws Exception {
        long end = System.nanoTime() + seconds * 1_000_000_000L;
        while (!done.call()) {
            if (System.nanoTime() > end) return false;
            Thread.sleep(20);
        }
        return true;
    }

    static Message message(String topic, String tag, String body) {
        return new Message(topic, tag, "key-" + body, body.getBytes(StandardCharsets.UTF_8));
    }

    static String text(MessageExt message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    static DefaultMQPushConsumer consumer(String group, String instance) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(server);
        consumer.setInstanceName(instance);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    static List<String> collect(DefaultMQPushConsumer consumer) throws Exception {
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) seen.add(text(message));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return seen;
    }

    static String send() throws Exception {
        for (int i = 0; i < 30; i++) {
            Message message = message("old", "t" + i % 3, "m" + i);
            message.putUserProperty("n", String.valueOf(i));
            if (producer.send(message).getSendStatus() != SendStatus.SEND_OK) return "m" + i;
        }
        for (int i = 30; i < 40; i++) producer.sendOneway(message("old", "t0", "m" + i));
        return null;
    }

    static String push() throws Exception {
        DefaultMQPushConsumer everything = consumer("oldpush", "all"), tagged = consumer("oldtags", "tags");
        everything.subscribe("old", "*");
        tagged.subscribe("old", "t1 || t2");
        List<String> seen = collect(everything), byTag = collect(tagged);
        boolean all = until(40, () -> seen.size() >= 40 && byTag.size() >= 20);
        producer.send(message("old", "t0", "while it waits"));
        all &= until(10, () -> seen.contains("while it waits"));
        everything.shutdown();
        tagged.shutdown();
        return all && seen.size() == 41 && byTag.size() == 20 ? null : seen.size() + " and " + byTag.size();
    }

    static String retry() throws Exception {
        List<Integer> attempts = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = consumer("oldretries", "retry");
        consumer.subscribe("oldretries", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            attempts.add(messages.get(0).getReconsumeTimes());
            context.setDelayLevelWhenNextConsume(1);
            return attempts.size() == 1 ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        producer.send(message("oldretries", "a", "bad"));
        consumer.start();
        until(60, () -> attempts.size() >= 2);
        consumer.shutdown();
        return attempts.equals(List.of(0, 1)) ? null : attempts.toString();
    }

    static String order() throws Exception {
        for (int i = 0; i < 60; i++) {
            int key = i % 3;
            producer.send(message("oldorder", "a", key + ":" + i), (queues, m, k) -> queues.get((Integer) k), key);
        }
        Map<String, List<Integer>> seen = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = consumer("oldorder", "order");
        consumer.subscribe("oldorder", "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt message : messages) {
                String[] parts = text(message).split(":");
                seen.computeIfAbsent(parts[0], k -> Collections.synchronizedList(new ArrayList<>())).add(Integer.parseInt(parts[1]));
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        boolean all = until(60, () -> seen.values().stream().mapToInt(List::size).sum() >= 60);
        consumer.shutdown();
        for (List<Integer> numbers : seen.values()) {
            List<Integer> sorted = new ArrayList<>(numbers);
            Collections.sort(sorted);
            if (!sorted.equals(numbers)) return "out of order: " + numbers;
        }
        return all ? null : "not all: " + seen;
    }

    static String delay() throws Exception {
        Message later = message("olddelays", "a", "later");
        later.setDelayTimeLevel(2); // 5 s
        DefaultMQPushConsumer consumer = consumer("olddelays", "delay");
        consumer.subscribe("olddelays", "*");
        long begin = System.nanoTime();
        producer.send(later);
        List<String> seen = collect(consumer);
        boolean came = until(30, () -> !seen.isEmpty());
        consumer.shutdown();
        if (!came) return "not delivered";
        return System.nanoTime() - begin >= 4_990_000_000L ? null : "too early";
    }

    static String pull() throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("oldpull");
        consumer.setNamesrvAddr(server);
        consumer.start();
        int pulled = 0;
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues("old")) {
            long end = consumer.maxOffset(queue);
            for (long next = consumer.minOffset(queue); next < end; next = consumer.pull(queue, "*", next, 8).getNextBeginOffset())
                pulled += consumer.pull(queue, "*", next, 8).getMsgFoundList().size();
        }
        consumer.shutdown();
        return pulled == 41 ? null : pulled + " of 41";
    }
}
